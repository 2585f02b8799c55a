from edge0_train.cli import main

main()
