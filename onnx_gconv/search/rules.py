"""Group counts by rule: one G everywhere, the paper's G_M, or a borrowed configuration.

A refusal is a value: the reason, for people, why a layer stays as it is.
"""

from collections.abc import Sequence


def uniform(legal: Sequence[int], groups: int) -> int | str:
    """Return `groups` where it is legal."""
    if groups in legal:
        return groups
    return f"{groups} groups are not legal here, only {', '.join(map(str, legal))}"


def by_group_channels(legal: Sequence[int], most: int, *, in_channels: int, out_channels: int) -> int | str:
    """Return the fewest groups with max(Cin/G, Cout/G) <= G_M, the paper's rule for its Figure 6."""
    enough = [groups for groups in legal if max(in_channels, out_channels) // groups <= most]
    if not enough:
        return f"no legal number of groups brings it to {most} channels per group"
    if enough[0] == legal[0]:
        return f"it has at most {most} channels per group already"
    return enough[0]
