"""Ready models and data sets, for the command and the examples.

A *recipe* is a module whose names a config refers to, as in `model: lockstep.recipes.digits:Net`. It is
ordinary code, which nothing imports until a config names it; yours needs no registration and no base class. It
may define

- a model: an `nn.Module` class, made with the config's `model_args`;
- `datasets(...)`: returns `(train, test)`, two map-style data sets, made with the config's `data_args`;
- a loss: `loss(output, target)` returns a finite scalar, the mean over the samples it was given;
- a `finish` function: takes the trained model and returns a text to print, such as a sample of what it writes.

Three things keep a recipe true to "the same model on any number of workers":

- a data set is a function of its arguments and its files, and no random number decides what is a test sample;
- dropout and augmentation draw from torch's global generator, which is seeded anew for every shard of a step and
  for every sample; nothing draws at import;
- a data file that is missing, truncated or not what it should be is a `DataFileError`, never a smaller data set.

The recipes:

    digits    8x8 hand-written digits, which ship with the package; seconds of training on the CPU
    text      a character-level transformer on the standard library's own sources; minutes
    images    a folder of pictures, one sub-folder per class
"""
