"""Links: direct, encrypted connections between the averagers of different peers.

The network daemon forwards messages between peers and proves who sent them, at the cost of several
copies and two more processes. A link is one TCP connection without it. The peers agree on the
link's secret through the daemon, so the link is authenticated by the same identities.

``wire``
    Frames on a socket that never blocks.
``link``
    Calls with streams of packets in both directions, over one wire.
``cipher``
    Encryption of what travels over a wire.
``handshake``
    One-time secrets, and the proofs at the start of a connection.
``links``
    All links of one averager: its listener, and a link to each member where one is possible.
"""
