"""Lockstep in libraries that wrap models themselves, by what each library offers for that; nothing is patched.

    accelerate.py    Hugging Face Accelerate, and the Trainer of Transformers, which uses it
    lightning.py     Lightning's Trainer
    fabric.py        Lightning Fabric

Each module imports its library, which Lockstep does not depend on. `lockstep.drop_in` does the same for scripts that
are not changed at all.
"""
