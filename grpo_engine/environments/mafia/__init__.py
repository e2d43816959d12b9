"""A small game of social deduction, pure: grammar, rules, what a seat may know, and players that are no model."""
