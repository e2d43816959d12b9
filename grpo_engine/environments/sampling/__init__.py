"""From an item to scored groups: prompts, requests to the policy, conversations, rewards."""
