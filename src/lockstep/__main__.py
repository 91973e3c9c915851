"""`python -m lockstep`: the command, where `lockstep` is not on the path."""

from lockstep_command import main

if __name__ == "__main__":
    main()
