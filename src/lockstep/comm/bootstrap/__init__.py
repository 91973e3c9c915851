"""Setting up a process group: who this worker is, where the workers meet, and whether all of them are there.

Steps, in order: read rank, world size and address from the launcher's environment variables (`identity.py`), open the
store (`store.py`), check that every rank is there with the same settings (`handshake.py`), set the network
interface (`interface.py`), make the group (`process_group.py`).
"""
