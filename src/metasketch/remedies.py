"""What to change in a recipe whose training is not smooth in its data weights, in plain words."""

from torch import nn

from metasketch import optim
from metasketch.recipe import Recipe

_KINKED = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid)
_MAXIMA = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

_START = 0.5
"""Share of the peak rate at which a run may begin before a warm-up is proposed."""


def remedies(recipe: Recipe) -> tuple[str, ...]:
    """Knobs to turn, those that help most first."""
    found = [_rate(recipe)]
    if recipe.rates[0] > _START * max(recipe.rates):
        found.append(
            "warm up: begin at a tenth of the peak rate, such as "
            "schedule=ms.one_cycle(peak=0.3, start=0.1, end=0.0)"
        )
    found += _optimizer(recipe.optimizer)
    found.append(
        f"a larger batch than {len(recipe.order.batches[0])}: single examples then steer a step "
        "less"
    )
    return (*found, *_modules(recipe.model))


def _rate(recipe: Recipe) -> str:
    peak = recipe.optimizer.lr * max(recipe.rates)
    return (
        f"a smaller learning rate: its peak is {peak:.3g}; try {peak / 4:.2g}, and more steps if "
        "the model then learns too little"
    )


def _optimizer(optimizer: optim.Optimizer) -> list[str]:
    found = []
    if isinstance(optimizer, optim.Adam) and optimizer.eps_root == 0:
        found.append(
            "eps_root=1e-8 (or more) in Adam: √v has an infinite slope where gradients vanish"
        )
    if isinstance(optimizer, optim.SGD) and optimizer.momentum > 0.9:
        found.append(f"less momentum than {optimizer.momentum}: it multiplies the rate")
    return found


def _modules(model: nn.Module) -> list[str]:
    """Parts with kinks, and networks without normalisation."""
    parts = list(model.modules())
    found = []
    for kinds, instead in ((_KINKED, "GELU or SiLU"), (_MAXIMA, "average pooling")):
        if names := sorted({type(m).__name__ for m in parts if isinstance(m, kinds)}):
            found.append(f"{instead} in place of {', '.join(names)}, which has kinks")
    if not any(isinstance(m, _NORMS) for m in parts):
        found.append("normalisation before the nonlinearities: the model has none")
    return found
