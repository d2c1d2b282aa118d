"""Links: direct, encrypted connections between the averagers of different peers.

The network daemon forwards messages between peers and authenticates their senders. Each message is
copied several times and passes two more processes. A link is one TCP connection without the daemon.
Its secret travels through the daemon, so the link is authenticated by the same identities.

``wire``
    Frames on a socket that never blocks.
``link``
    Calls with streams of packets in both directions, over one wire.
``records``
    Pieces of a wire's stream, each of them encrypted as a whole.
``cipher``
    Encryption of a wire.
``handshake``
    One-time secrets, and the proofs at the start of a connection.
``links``
    All links of one averager: its listener, and a link to each member where one is possible.
"""
