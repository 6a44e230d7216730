"""`python -m tltlab`."""

from .cli import main

if __name__ == "__main__":
    main()
