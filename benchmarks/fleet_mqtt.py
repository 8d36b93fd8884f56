"""Processor time of one message of QoS 1 out and one in: the manager's connection, gmqtt and paho.

    scripts/python benchmarks/fleet_mqtt.py

About 15 s. A real mosquitto as `edgekit fleet up` starts it, over TLS; 8,000 messages of 1,500 bytes to as
many topics, which the sender itself subscribes to. Each runs in a process of its own, twice, in turn.
"""

import argparse
import asyncio
import os
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.free_port import free_port

from edgekit_fleet.broker.mosquitto import Mosquitto, write_configuration
from edgekit_fleet.identity.authority import MANAGER, Authority, open_authority
from edgekit_fleet.manager.broker_link import BrokerLink, make_context
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_runtime.agent.documents import topic
from results import make_parser

MESSAGES, BODY, LIMIT_S = 8000, os.urandom(1500), 60.0


class Count:
    def __init__(self, done: Callable[[], None]) -> None:
        self._left, self._done = MESSAGES, done

    def __call__(self, *_: object) -> int:
        self._left -= 1
        if not self._left:
            self._done()
        return 0


async def measure_own(port: int, context: ssl.SSLContext) -> float:
    done = asyncio.Event()
    link = BrokerLink(Count(done.set))
    await link.connect([("127.0.0.1", port)], context)
    begin_s = time.process_time()
    for number in range(MESSAGES):
        link.publish(f"d{number}", "event", BODY, retain=False)
        if number % 100 == 99:
            await asyncio.sleep(0)
    await asyncio.wait_for(done.wait(), LIMIT_S)
    used_s = time.process_time() - begin_s
    await link.close()
    return used_s


async def measure_gmqtt(port: int, context: ssl.SSLContext) -> float:
    import gmqtt
    from gmqtt.mqtt.constants import MQTTv311

    done, ready = asyncio.Event(), asyncio.Event()
    client = gmqtt.Client(MANAGER)
    client.on_message, client.on_subscribe = Count(done.set), lambda *_: ready.set()
    await client.connect("127.0.0.1", port, ssl=context, version=MQTTv311)
    client.subscribe(topic("+", "event"), qos=1)
    await ready.wait()
    begin_s = time.process_time()
    for number in range(MESSAGES):
        client.publish(topic(f"d{number}", "event"), BODY, qos=1)
        if number % 100 == 99:
            await asyncio.sleep(0)
    await asyncio.wait_for(done.wait(), LIMIT_S)
    used_s = time.process_time() - begin_s
    await client.disconnect()
    return used_s


def measure_paho(port: int, context: ssl.SSLContext) -> float:
    import paho.mqtt.client as paho
    from paho.mqtt.enums import CallbackAPIVersion

    done, ready, connected = threading.Event(), threading.Event(), threading.Event()
    client = paho.Client(CallbackAPIVersion.VERSION2, MANAGER)
    client.tls_set_context(context)
    client.max_inflight_messages_set(200)
    client.on_message = Count(done.set)
    client.on_connect, client.on_subscribe = lambda *_: connected.set(), lambda *_: ready.set()
    client.connect("127.0.0.1", port)
    client.loop_start()
    connected.wait(LIMIT_S)
    client.subscribe(topic("+", "event"), 1)
    ready.wait(LIMIT_S)
    begin_s = time.process_time()
    for number in range(MESSAGES):
        client.publish(topic(f"d{number}", "event"), BODY, 1)
    done.wait(LIMIT_S)
    used_s = time.process_time() - begin_s
    client.loop_stop()
    return used_s


MEASURES: dict[str, Callable[[int, ssl.SSLContext], Any]] = {
    "own": lambda port, context: asyncio.run(measure_own(port, context)),
    "gmqtt": lambda port, context: asyncio.run(measure_gmqtt(port, context)),
    "paho": measure_paho,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        library, port, identity = options.one
        used_s = MEASURES[library](int(port), make_context(Authority(Path(identity))))
        print(f"{library:6} {1e6 * used_s / MESSAGES:4.0f} us", flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        folder, settings = FleetFolder(Path(name)), FleetSettings(broker_port=free_port())
        authority = open_authority(folder, settings)
        with Mosquitto(write_configuration(folder, settings, authority), settings, authority):
            for library in [*MEASURES] * 2:
                place = (library, str(settings.broker_port), str(authority.folder))
                subprocess.run([sys.executable, __file__, "--one", *place], check=True)


if __name__ == "__main__":
    main()
