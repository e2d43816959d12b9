"""What can be supervised: one file a kind; `kinds` holds the union that registers them."""
