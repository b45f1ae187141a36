"""A supervised stage of another policy than the one that is evaluated."""

import flowrl as fl


@fl.workflow
def student_sft(examples: fl.Examples, student: fl.Policy):
    student.update(examples, loss=fl.loss.cross_entropy())
