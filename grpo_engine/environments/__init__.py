"""Tasks (data and reward) and the runner that turns their items into scored groups.

An item's way: `runner` draws it from `item_source` and has `rolling_out` sample it, which asks the `policy` (one question
for all completions, or every seat of a game turn by turn; `prompts` makes the tokens) and keeps each sequence as a
`groups.Conversation`. With their rewards these become a `ScoredGroup`, which `peers` posts.
"""
