"""Replay of a recorded step under changed conditions."""
