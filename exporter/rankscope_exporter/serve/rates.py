"""
How many requests each client may send: a token bucket for each address, in bounded memory.
"""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass

CAPACITY = 4096
"""
Most addresses that are remembered; the one that was heard of longest ago is forgotten, which only ever allows more.
"""
IPV6_NETWORK_BITS = 64
"""
Whoever has one IPv6 address has all of its network.
"""


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


class Rates:
    """
    Lets each key through `rate` times a second, and `burst` times at once; a rate of 0 lets everything through.

    Times are seconds of one clock; where it goes back, it counts as standing.
    """

    def __init__(self, rate: float, burst: int, *, capacity: int = CAPACITY) -> None:
        self._rate = rate
        self._burst = burst
        self._capacity = capacity
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def __len__(self) -> int:
        """How many keys are remembered."""
        return len(self._buckets)

    def take(self, key: str, now: float) -> float:
        """
        Let `key` through once: 0.0 if it may pass, else the seconds until it may.
        """
        if self._rate == 0:
            return 0.0
        bucket = self._filled(key, now)
        if bucket.left >= 1.0:
            bucket.left -= 1.0
            return 0.0
        return (1.0 - bucket.left) / self._rate

    def wait(self, key: str, now: float) -> float:
        """
        The seconds until `key` may pass, without letting it through.
        """
        if self._rate == 0 or key not in self._buckets:
            return 0.0
        return max(0.0, (1.0 - self._filled(key, now).left) / self._rate)

    def _filled(self, key: str, now: float) -> _Bucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(float(self._burst), now)
            if len(self._buckets) > self._capacity:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        if now > bucket.at:
            bucket.left = min(float(self._burst), bucket.left + (now - bucket.at) * self._rate)
            bucket.at = now
        return bucket


def client_key(address: str) -> str:
    """
    What counts as one client: an IPv4 address, or the network of an IPv6 address.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, IPV6_NETWORK_BITS), strict=False))
    return str(parsed)
