"""Tasks (data and reward) and the runner that turns their items into scored groups.

An item's way: `runner` draws it from `item_source` and has `rolling_out` sample it. That asks the `policy`, once for a
question's completions or turn by turn for every seat of a game (`prompts` makes the tokens), and keeps each sequence as
a `groups.Conversation`; with their rewards these become a `ScoredGroup`, which `peers` posts.
"""
