"""`python -m tltlab`."""

from tltlab.cli.app import main

if __name__ == "__main__":
    main()
