from lockstep.engine.present import Continued as Continued
from lockstep.engine.step_table import StepResult as StepResult
from lockstep.engine.trainer import Trainer as Trainer
