"""Tasks and their data: random access by index, batched by grain."""
