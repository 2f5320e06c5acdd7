"""A recipe by name: ``path/to/file.py:function`` or ``module:function``, with its mistakes named.

The function takes nothing and returns ``(recipe, queries)``.
"""

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from metasketch.errors import MetasketchError, RecipeError
from metasketch.queries import Queries
from metasketch.recipe import Recipe

_FORM = "name a recipe as path/to/file.py:function, or module:function"


def load(name: str) -> tuple[Recipe, Queries]:
    """The recipe and queries that a function in a file or module returns."""
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        raise RecipeError(f"{name!r} is not the name of a recipe: {_FORM}{_offered(name)}")
    module = _module(place)
    found = getattr(module, function, None)
    if found is None:
        raise RecipeError(f"{place} has no function {function!r}{_meant(function, module)}")
    if not callable(found):
        raise RecipeError(
            f"{name} is a {type(found).__name__}; it must be a function that returns "
            "(recipe, queries)"
        )
    with _blamed(f"{name} failed"):
        made = found()
    return _checked(name, made)


def short_name(name: str) -> str:
    """A name for the folder of a recipe's results.

    >>> short_name("problems/digits.py:small")
    'digits-small'
    """
    place, _, function = name.rpartition(":")
    stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    return f"{stem}-{function}"


def where(error: BaseException) -> str:
    """File and line of the user's code in which an error arose, in words; "" where there is none.

    The innermost frame that is neither the library's, nor Python's, nor an installed package's.
    """
    foreign = (str(Path(__file__).parent), str(Path(os.__file__).parent), "site-packages", "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename for part in foreign):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def _module(place: str) -> ModuleType:
    if place.endswith(".py") or os.sep in place:
        return _from_file(Path(place).expanduser())
    with _importable(Path.cwd()), _blamed(f"importing {place} failed"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise
            raise RecipeError(
                f"there is no module {place!r} here or among the installed ones; {_FORM}"
            ) from None


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RecipeError(f"there is no file {path}{_near(path)}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{path} is not a Python file: {_FORM}")
    module = importlib.util.module_from_spec(spec)
    # As for a script: classes find their module, and the file its neighbours.
    sys.modules[path.stem] = module
    with _importable(path.parent.absolute()), _blamed(f"running {path} failed"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    yield


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    """Errors of the user's own code, told with its file and line."""
    try:
        yield
    except MetasketchError:
        raise
    except SyntaxError as error:
        raise RecipeError(f"{what}: {error.msg} ({error.filename}, line {error.lineno})") from error
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise RecipeError(f"{what}: {said}{where(error)}") from error


def _checked(name: str, made: Any) -> tuple[Recipe, Queries]:
    if isinstance(made, tuple) and len(made) == 2:
        recipe, queries = made
        if isinstance(recipe, Recipe) and isinstance(queries, Queries):
            return recipe, queries
        if isinstance(recipe, Queries) and isinstance(queries, Recipe):
            raise RecipeError(f"{name} returns (queries, recipe); turn them round")
    if isinstance(made, tuple):
        kind = f"({', '.join(type(part).__name__ for part in made)})"
    else:
        kind = "nothing" if made is None else f"a {type(made).__name__}"
    raise RecipeError(
        f"{name} returns {kind}; it must return (recipe, queries): an ms.Recipe and an ms.Queries"
    )


def _offered(name: str) -> str:
    """The functions of a file that was named without one."""
    path = Path(name).expanduser()
    if not (name.endswith(".py") and path.is_file()):
        return ""
    functions = _functions(_from_file(path))
    return f". {name} has {', '.join(functions)}" if functions else f". {name} has no functions"


def _functions(module: ModuleType) -> list[str]:
    own = (n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__)
    return sorted(n for n in own if not n.startswith("_") and callable(getattr(module, n)))


def _meant(function: str, module: ModuleType) -> str:
    functions = _functions(module)
    near = difflib.get_close_matches(function, functions, n=1)
    if near:
        return f": did you mean {near[0]!r}?"
    return f"; it has {', '.join(functions)}" if functions else "; it has none"


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f", and no folder {path.parent}"
    others = sorted(p.name for p in path.parent.glob("*.py"))
    near = difflib.get_close_matches(path.name, others, n=1, cutoff=0.5)
    return f": did you mean {path.parent / near[0]}?" if near else ""
