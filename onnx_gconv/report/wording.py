"""What a plan does to a model, in words."""

# By form, what became of the MACs that it saved.
SAVED_BY = {"width": "fewer channels", "drop": "dropped branches", "group": "groups", "lowrank": "low rank"}
Verbs = tuple[str, str, str, str]  # of spaces, branches, layers of low rank, grouped layers


def counted(number: int, noun: str) -> str:
    """Return so many of something: 1 branch, 2 branches."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def what_was_done(*, spaces: int, branches: int, layers: int, convs: int, ranks: int = 0) -> str:
    """Return what was done to a model of so many Convs: narrowed 9 spaces, dropped 1 branch, grouped 3 of 19 Convs."""
    parts = [f"narrowed {counted(spaces, 'space')}"] if spaces else []
    parts += [f"dropped {counted(branches, 'branch')}"] if branches else []
    parts += [f"factored {counted(ranks, 'Conv')}"] if ranks else []
    parts += [f"grouped {layers} of {counted(convs, 'Conv')}"] if layers or not parts else []
    return ", ".join(parts)


def each_with(verbs: Verbs, *, spaces: int, branches: int, layers: int, ranks: int = 0, layer: str = "Conv") -> str:
    """Return what there is of each form, with its verb: 9 spaces narrowed, 1 branch dropped, 2 Convs factored, 3 Convs grouped."""
    numbers = ((spaces, "space"), (branches, "branch"), (ranks, layer), (layers, layer))
    parts = [f"{counted(number, noun)} {verb}" for (number, noun), verb in zip(numbers, verbs, strict=True) if number]
    return ", ".join(parts) or f"no {layer} {verbs[-1]}"
