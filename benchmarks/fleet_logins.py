"""Whether guesses of a password keep its user out, and what they cost the manager.

    scripts/python -m benchmarks.fleet_logins [--seconds N]

Clients guess the password of one user at the console of `edgekit fleet up`, all from the user's address:
first twenty without a pause, then, after a minute of rest, one that guesses once in 4 s. After 10 s the user
logs in with the browser that was used before the guesses, and in a new browser, which repeats the right
password each second. Prints the seconds until each is in (null: not within `--seconds`), the guesses that
were checked a minute, and the cores that the manager took before and during the guesses.
"""

import http.client
import json
import threading
import time
from http.cookies import SimpleCookie
from urllib.parse import urlencode

from benchmarks.fleet_parts import running_on_free_ports
from benchmarks.processes import read_cpu_s
from benchmarks.results import make_parser

from edgekit_fleet.access import users
from edgekit_fleet.store.fleet_folder import FleetFolder

USER, PASSWORD, BEGIN_S = "ada", "correct horse battery", 10.0
ATTACKS = {"flood": (20, 0.0), "slow": (1, 4.0)}


class Browser:
    def __init__(self, port: int) -> None:
        self._port = port
        self._cookies: dict[str, str] = {}
        self._send("GET")

    def log_in(self, password: str) -> int:
        """Return the status of the answer: 303, 401 or 429."""
        self._cookies = {name: value for name, value in self._cookies.items() if "login" not in name}
        csrf = next(value for name, value in self._cookies.items() if "visitor" in name)
        return self._send("POST", urlencode({"name": USER, "password": password, "csrf": csrf}))

    def _send(self, method: str, body: str | None = None) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60.0)
        cookies = "; ".join(f"{name}={value}" for name, value in self._cookies.items())
        kind = "application/x-www-form-urlencoded"
        connection.request(method, "/login", body, {"cookie": cookies, "content-type": kind})
        response = connection.getresponse()
        response.read()
        for text in response.headers.get_all("set-cookie") or ():
            self._cookies |= {name: morsel.value for name, morsel in SimpleCookie(text).items()}
        connection.close()
        return response.status


def time_login(browser: Browser, limit_s: float) -> float | None:
    """Return the seconds until the right password is taken, tried each second; None after `limit_s`."""
    begin_s = time.monotonic()
    while (took_s := time.monotonic() - begin_s) < limit_s:
        if browser.log_in(PASSWORD) == http.client.SEE_OTHER:
            return round(time.monotonic() - begin_s, 2)
        time.sleep(max(0.0, took_s + 1.0 - (time.monotonic() - begin_s)))
    return None


def attack(pid: int, port: int, seconds: float, clients: int, pause_s: float) -> dict[str, object]:
    """Guess passwords; returns what the user and the manager went through."""
    known, new, over, statuses = Browser(port), Browser(port), threading.Event(), []
    assert known.log_in(PASSWORD) == http.client.SEE_OTHER
    quiet_cpu_s = read_cpu_s(pid)
    time.sleep(5.0)
    quiet_cores = (read_cpu_s(pid) - quiet_cpu_s) / 5.0

    def guess() -> None:
        browser = Browser(port)
        while not over.is_set():
            statuses.append(browser.log_in("guess"))
            over.wait(pause_s)

    begin_s, begin_cpu_s = time.monotonic(), read_cpu_s(pid)
    threads = [threading.Thread(target=guess) for _ in range(clients)]
    for thread in threads:
        thread.start()
    time.sleep(BEGIN_S)
    known_s = time_login(known, seconds)
    new_s = time_login(new, seconds)
    time.sleep(max(0.0, begin_s + seconds - time.monotonic()))
    over.set()
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - begin_s
    return {
        "known_browser_s": known_s,
        "new_browser_s": new_s,
        "guesses_a_second": round(len(statuses) / took_s),
        "checked_a_minute": round(statuses.count(http.client.UNAUTHORIZED) * 60 / took_s, 1),
        "manager_cores_before": round(quiet_cores, 2),
        "manager_cores": round((read_cpu_s(pid) - begin_cpu_s) / took_s, 2),
        "seconds": round(took_s),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    with running_on_free_ports() as (folder, pid, ports):
        store = FleetFolder(folder).open_store()
        with store.transaction() as session:
            users.add_user(session, USER, PASSWORD, "admin", actor="benchmark")
        store.close()
        for name, (clients, pause_s) in ATTACKS.items():
            result = attack(pid, ports["console"], seconds, clients, pause_s)
            print(json.dumps({"attack": name, **result}), flush=True)
            time.sleep(60.0)


if __name__ == "__main__":
    main()
