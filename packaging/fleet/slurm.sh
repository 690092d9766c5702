#!/bin/bash
# Workers of a fleet as a Slurm array: one card an element. Slurm starts and restarts them, the board hands out the work.
#   sbatch --array=0-15 --export=ALL,AMK_BOARD=postgres://amk_worker@db.example/amk packaging/fleet/slurm.sh
# The password is in a file that only you can read: ~/.amk-board-password. On preemption and at the end of the time limit
# Slurm sends SIGTERM first: the worker gives its job back within 5 s.
#SBATCH --job-name=amk-fleet
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=48G
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@60
#SBATCH --open-mode=append
set -euo pipefail
: "${AMK_BOARD:?the address of the board, such as postgres://amk_worker@db.example/amk}"
PGPASSWORD=$(<"${AMK_BOARD_PASSWORD_FILE:-$HOME/.amk-board-password}")
export PGPASSWORD
# `srun` passes signals on to the worker, which then ends with exit code 0.
exec srun --kill-on-bad-exit=0 "${AMK:-amk}" fleet worker --board "$AMK_BOARD" --device "${AMK_DEVICE:-cuda}" \
  --out "${AMK_OUT:-runs/fleet}" --until-done
