"""What a command line may say: settings and their options, keys, configuration files, help and completion."""
