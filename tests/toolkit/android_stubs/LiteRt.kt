package org.tensorflow.lite

import java.nio.ByteBuffer

enum class DataType { FLOAT32, INT32, UINT8, INT64, STRING, BOOL, INT16, INT8 }

interface Tensor {
    class QuantizationParams(val scale: Float, val zeroPoint: Int)

    fun name(): String
    fun dataType(): DataType
    fun numBytes(): Int
    fun numElements(): Int
    fun quantizationParams(): QuantizationParams
}

class Interpreter(content: ByteBuffer, options: Options) : AutoCloseable {
    class Options {
        fun setNumThreads(threads: Int): Options = TODO("$threads")
    }

    val signatureKeys: Array<String> get() = TODO()
    fun getInputIndex(name: String): Int = TODO(name)
    fun getOutputIndex(name: String): Int = TODO(name)
    fun getInputTensor(index: Int): Tensor = TODO("$index")
    fun getOutputTensor(index: Int): Tensor = TODO("$index")
    fun getInputTensorFromSignature(name: String, key: String): Tensor = TODO(name + key)
    fun getOutputTensorFromSignature(name: String, key: String): Tensor = TODO(name + key)
    fun runForMultipleInputsOutputs(inputs: Array<Any?>, outputs: Map<Int, Any>): Unit = TODO("$inputs $outputs")
    fun runSignature(inputs: Map<String, Any>, outputs: Map<String, Any>, key: String): Unit = TODO("$inputs $outputs $key")
    override fun close() = Unit
}
