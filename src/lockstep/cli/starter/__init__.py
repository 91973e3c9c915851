"""What `lockstep init` copies: for each kind of data a module, which becomes mine.py, and a config, mine.yaml."""
