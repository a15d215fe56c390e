"""Our measured trial under other tools' loops."""
