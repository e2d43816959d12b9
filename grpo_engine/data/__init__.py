"""Where groups come from, and how they become batches.""" ""
