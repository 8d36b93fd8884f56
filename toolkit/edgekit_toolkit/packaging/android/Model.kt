package edgekit

import java.io.Closeable
import java.nio.ByteBuffer
import java.nio.ByteOrder
import kotlin.math.round
import org.tensorflow.lite.DataType
import org.tensorflow.lite.Interpreter
import org.tensorflow.lite.Tensor

/** A tensor of the model; [golden] is the asset with each [every]th of its golden values. */
class ExportedTensor(
    val name: String,
    val shape: IntArray,
    val golden: String,
    val every: Int,
    val atol: Float,
    val rtol: Float
)

/** The model in LiteRT. Values are float32 or whole numbers; codes of quantized tensors are made and read here. */
class Model(content: ByteBuffer, threads: Int) : Closeable {
    private val interpreter = Interpreter(content, Interpreter.Options().setNumThreads(threads))
    private val signature: String? = interpreter.signatureKeys.singleOrNull()

    /** Runs the model on the values of each of [Exported.INPUTS]; returns those of each of [Exported.OUTPUTS]. */
    fun run(inputs: List<FloatArray>): List<FloatArray> {
        val outputs = Exported.OUTPUTS.map { allocate(outputTensor(it.name)) }
        val encoded = Exported.INPUTS.zip(inputs) { input, values -> encode(values, inputTensor(input.name)) }
        if (signature != null) {
            val named = Exported.INPUTS.map { it.name }.zip(encoded).toMap<String, Any>()
            val results = Exported.OUTPUTS.map { it.name }.zip(outputs).toMap<String, Any>()
            interpreter.runSignature(named, results, signature)
        } else {
            val ordered = arrayOfNulls<Any>(encoded.size)
            Exported.INPUTS.zip(encoded) { input, buffer -> ordered[interpreter.getInputIndex(input.name)] = buffer }
            val indexed = Exported.OUTPUTS.map { interpreter.getOutputIndex(it.name) }.zip(outputs).toMap<Int, Any>()
            interpreter.runForMultipleInputsOutputs(ordered, indexed)
        }
        return Exported.OUTPUTS.zip(outputs) { output, buffer -> decode(buffer, outputTensor(output.name)) }
    }

    private fun inputTensor(name: String): Tensor =
        if (signature != null) interpreter.getInputTensorFromSignature(name, signature)
        else interpreter.getInputTensor(interpreter.getInputIndex(name))

    private fun outputTensor(name: String): Tensor =
        if (signature != null) interpreter.getOutputTensorFromSignature(name, signature)
        else interpreter.getOutputTensor(interpreter.getOutputIndex(name))

    private fun allocate(tensor: Tensor): ByteBuffer =
        ByteBuffer.allocateDirect(tensor.numBytes()).order(ByteOrder.nativeOrder())

    override fun close() = interpreter.close()

    private fun encode(values: FloatArray, tensor: Tensor): ByteBuffer {
        require(values.size == tensor.numElements()) {
            "${values.size} values, input ${tensor.name()} takes ${tensor.numElements()}"
        }
        val buffer = allocate(tensor)
        val codes = tensor.quantizationParams()
        for (value in values) {
            val code = if (codes.scale == 0f) value else round(value / codes.scale) + codes.zeroPoint
            when (tensor.dataType()) {
                DataType.FLOAT32 -> buffer.putFloat(value)
                DataType.INT8 -> buffer.put(code.coerceIn(-128f, 127f).toInt().toByte())
                DataType.UINT8 -> buffer.put(code.coerceIn(0f, 255f).toInt().toByte())
                DataType.INT32 -> buffer.putInt(value.toInt())
                DataType.INT64 -> buffer.putLong(value.toLong())
                else -> throw IllegalArgumentException("input ${tensor.name()} is ${tensor.dataType()}")
            }
        }
        buffer.rewind()
        return buffer
    }

    private fun decode(buffer: ByteBuffer, tensor: Tensor): FloatArray {
        buffer.rewind()
        val codes = tensor.quantizationParams()
        return FloatArray(tensor.numElements()) {
            val stored = when (tensor.dataType()) {
                DataType.FLOAT32 -> buffer.getFloat()
                DataType.INT8 -> buffer.get().toFloat()
                DataType.UINT8 -> (buffer.get().toInt() and 255).toFloat()
                DataType.INT32 -> buffer.getInt().toFloat()
                DataType.INT64 -> buffer.getLong().toFloat()
                else -> throw IllegalArgumentException("output ${tensor.name()} is ${tensor.dataType()}")
            }
            if (codes.scale == 0f) stored else (stored - codes.zeroPoint) * codes.scale
        }
    }
}
