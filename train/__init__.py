"""Commands that train and evaluate, and what they share; run them from a checkout."""
