"""A fleet that takes samples, and devices that send them over HTTPS with their certificates."""

import base64
import contextlib
import http.client
import ssl

from tests.fleet.test_web import Site

from edgekit_fleet.operations import samples
from edgekit_fleet.samples.vault import SampleVault
from edgekit_fleet.web.sample_uploads import UploadLimits
from edgekit_fleet.web.server import serve_devices
from edgekit_runtime.encryption.key_wrapping import seal
from edgekit_runtime.protocol.samples import Sample, SampleHeader, sample_info, write_sample


class SampleSite(Site):
    """Store, vault and web server, without a broker; samples are switched on."""

    def __init__(self, path):
        super().__init__(path)
        self.vault = SampleVault(self.folder, self.settings)
        samples.switch(self.store, self.vault, is_on=True, days=30, max_bytes=1 << 30, actor="ann")

    @contextlib.contextmanager
    def serve(self, **limits):
        parts = (self.store, self.folder, self.settings, self.authority)
        with serve_devices(*parts, upload_limits=UploadLimits(**limits)):
            yield self
        self.store.close()

    def order(self, model="detector", selector="all", when="uncertain or random", **changes):
        options = {"per_day": 20.0, "max_bytes": 50 << 20, "days": 14.0, **changes}
        triggers = samples.parse_triggers(when)
        request = samples.StartSamples(model=model, selector=selector, triggers=triggers, **options)
        return samples.start(self.store, request, actor="ann")

    def sender(self, name, **options):
        return Sender(self, self.device(name, **options).enrol())


class Sender:
    """The part of an agent that sends samples."""

    def __init__(self, site, device):
        self.site, self.name, self.context = site, device.name, device.context()

    def request(self, method, sample_id, body=None, *, certificate=True, **headers):
        context = self.context if certificate else ssl.create_default_context(cadata=self.site.pem)
        port = self.site.settings.web_port
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=20)
        try:
            connection.request(method, f"/samples/{sample_id}", body, headers)
            answer = connection.getresponse()
            answer.text = answer.read().decode()
            return answer
        finally:
            connection.close()

    def head(self, sample_id):
        answer = self.request("HEAD", sample_id)
        return answer.status, answer.headers.get("upload-offset")

    def put(self, sample_id, sealed, begin=0, end=None, **options):
        part = sealed[begin:end]
        text = f"bytes {begin}-{begin + len(part) - 1}/{len(sealed)}"
        return self.request("PUT", sample_id, part, **{"Content-Range": text}, **options)

    def seal(self, order, number=1, *, content=b"a picture", answer=None, **changes):
        """Return identifier and sealed file of a sample."""
        fields = {
            "id": f"{number:032x}",
            "order": order.id,
            "model": order.model,
            "version": "1.0.0",
            "package_sha256": "a" * 64,
            "taken_at": 1.8e9,
            "triggers": ("uncertain",),
            "probability": 0.25,
            "media_type": "image/jpeg",
            **changes,
        }
        sample = Sample(header=SampleHeader(**fields), input=content, answer=answer or {})
        return fields["id"], self.seal_bytes(fields["id"], write_sample(sample))

    def seal_bytes(self, sample_id, plain):
        point = base64.b64decode(self.site.vault.make_key())
        return seal(plain, point, sample_info(sample_id))
