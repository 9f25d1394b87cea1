"""From a model to a plan: solve every layer, choose the groups, write down the decision."""
