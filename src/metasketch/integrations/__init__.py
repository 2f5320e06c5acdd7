"""Recipes from other libraries' training objects. None of them is imported before it is used."""
