"""What a run will take, before it is started (`mrl plan`): memory of every rank, communication, bubble, time."""
