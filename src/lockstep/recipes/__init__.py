"""Ready models and data sets, for the command and the examples.

A *recipe* is a module that a config refers to, as in `model: lockstep.recipes.digits:Net`. It is
ordinary code, imported only when a config names it. Your own recipe needs no registration and no base class. It
may define

- a model: an `nn.Module` class, constructed with the config's `model_args`;
- `datasets(...)`: called with the config's `data_args`; returns `(train, test)`, two map-style data sets;
- a loss: `loss(output, target)` returns a finite scalar, the mean over the samples;
- a `finish` function: takes the trained model and returns a text to print.

A recipe gives the same model on any number of workers if it follows three rules:

- a data set depends only on its arguments and files; test samples are not chosen by random numbers;
- dropout and augmentation use torch's global generator, which is seeded for every shard of a step and
  for every sample; no random numbers are drawn at import;
- a data file that is missing, truncated or wrong raises a `DataFileError`; it never yields a smaller data set.

The recipes:

    digits    8x8 hand-written digits, included in the package; trains in seconds on the CPU
    text      a character-level transformer on the standard library's sources; trains in minutes
    images    a folder of pictures, one sub-folder per class
"""
