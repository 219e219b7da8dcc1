#!/bin/bash
# Written by `agentfactory launch`. Each machine runs `agentfactory machine`, which reads its number from SLURM_PROCID.
# A job that is submitted again, or requeued after a preemption or its time limit, continues from the newest checkpoint.
$options
set -euo pipefail
cd $cwd
mkdir -p $folder
$exports
# anyone who reaches a server needs this key
$key=$${$key:-$$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
export $key
machines=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | paste -sd,)

srun --kill-on-bad-exit=1 --cpu-bind=none --output=$logs/"$$SLURM_JOB_ID-%t.log" --open-mode=append \
    $machine --machines "$$machines" &
running=$$!
# the time is almost over: let the trainers save, and continue in the same job
requeue=
trap 'requeue=1; scancel --signal=TERM "$$SLURM_JOB_ID"' USR1
# of a preemption, and of scancel: the machines get the signal too, and save
trap : TERM
while
    status=0
    wait "$$running" || status=$$?
    kill -0 "$$running" 2>/dev/null
do :; done
# SLURM does not requeue a preempted job that ends in its grace time
if ((status)) && { [[ $$requeue ]] || scontrol show job "$$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; }; then
    scontrol requeue "$$SLURM_JOB_ID"
fi
exit "$$status"
