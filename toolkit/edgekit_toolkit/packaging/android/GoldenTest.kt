package edgekit

import androidx.test.ext.junit.runners.AndroidJUnit4
import androidx.test.platform.app.InstrumentationRegistry
import java.nio.ByteBuffer
import java.nio.ByteOrder
import kotlin.math.abs
import org.junit.Assert.assertTrue
import org.junit.Test
import org.junit.runner.RunWith

/** The model on this phone gives the outputs that were recorded when it was packaged, within their tolerance. */
@RunWith(AndroidJUnit4::class)
class GoldenTest {
    private fun read(name: String): ByteBuffer {
        val bytes = InstrumentationRegistry.getInstrumentation().targetContext.assets.open(name).readBytes()
        val buffer = ByteBuffer.allocateDirect(bytes.size).order(ByteOrder.nativeOrder())
        buffer.put(bytes).rewind()
        return buffer
    }

    private fun readValues(name: String): FloatArray {
        val buffer = read(name).order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer()
        return FloatArray(buffer.remaining()).also { buffer.get(it) }
    }

    @Test
    fun goldenInputsGiveGoldenOutputs() {
        Model(read(Exported.MODEL), 2).use { model ->
            val outputs = model.run(Exported.INPUTS.map { readValues(it.golden) })
            for ((output, values) in Exported.OUTPUTS.zip(outputs)) {
                val expected = readValues(output.golden)
                val wrong = expected.indices.count {
                    !(abs(values[it * output.every] - expected[it]) <= output.atol + output.rtol * abs(expected[it]))
                }
                assertTrue("${output.name}: $wrong of ${expected.size} values differ", wrong == 0)
            }
        }
    }
}
