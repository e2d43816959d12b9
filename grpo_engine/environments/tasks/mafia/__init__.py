"""Mafia, a game of social deduction: rules, grammar of actions, visible information, scripted players, and the task."""
