"""The repro of one difference: a folder that anybody with torch can run, and that hashbench can replay."""
