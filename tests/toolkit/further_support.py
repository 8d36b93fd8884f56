"""The toolkit's module of an engine that the project does not have; see `further_engine`."""

from functools import partial

from tests.toolkit.further_engine import REFERENCE

from edgekit_toolkit.engines.record import EngineSupport, ModelMaker
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.scheme import ASYMMETRIC


class FurtherModel(OnnxModel):
    """An ONNX model that a further engine runs; see `Model`."""

    def __init__(self, proto, record):
        super().__init__(proto)
        self.engine, self._record = record.name, record

    def open(self, outputs=None, *, threads, rewrites=True):
        session = self.open_session(threads=threads)
        names = outputs or [spec.name for spec in session.outputs]

        def run(feeds):
            values = session.run(feeds)
            return [values[name] for name in names]

        return run

    def open_session(self, *, threads):
        return self._record.open_model(self.content, {}, threads)


def support(record):
    make = partial(FurtherModel, record=record)

    def open_quantizer(model, _target, *, threads, **_conversion):
        return OnnxQuantizer(model.proto, ASYMMETRIC, threads=threads, make=make)

    def build(model, form, _dims):
        built = forms.build(model.proto, form)
        return None if built is None else make(built)

    return EngineSupport(
        name=record.name,
        maker=ModelMaker(
            open_quantizer=open_quantizer,
            build=build,
            convert=make,
            convert_codes=lambda coded, _floats: make(coded),
        ),
        kinds=frozenset({forms.FLOAT32, forms.FLOAT16_WEIGHTS, forms.STATIC_INT8}),
        judged_on=record.name,
        competes=True,
    )


SUPPORTS = {record.name: support(record) for record in (REFERENCE,)}
