"""`accelerate launch train.py RECIPE [...]`: the same as `accelerate launch -m agentfactory.train RECIPE [...]`."""

from agentfactory.base.user_code.import_path import start_folder_last

if __name__ == "__main__":
    start_folder_last()

    from agentfactory.train import leave, supervised_main

    leave(supervised_main())
