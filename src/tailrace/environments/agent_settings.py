"""The settings of agents, until they stand with the other environments."""
MODEL = "policy"
