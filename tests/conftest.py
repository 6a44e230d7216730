"""Property tests draw the same examples in every run; `TLTLAB_FUZZ=1` draws new ones."""

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True, print_blob=True, deadline=None)
settings.register_profile("fuzz", print_blob=True, deadline=None)
settings.load_profile("fuzz" if os.environ.get("TLTLAB_FUZZ") else "same")
