"""How many draft tokens the target accepts: by position, request, tree and age of the drafter; replay."""
