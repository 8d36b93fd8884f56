// The parts of Android's, LiteRT's and JUnit's interfaces that exported code calls, after their documentation: code
// that compiles against these has no errors of its own, and nothing here runs.
// Sources: ai.google.dev/edge/api/tflite/java/org/tensorflow/lite/Interpreter; developer.android.com/reference
package android.graphics

abstract class Bitmap {
    abstract val width: Int
    abstract val height: Int
    abstract fun getPixels(pixels: IntArray, offset: Int, stride: Int, x: Int, y: Int, width: Int, height: Int)
}
