package edgekit

import android.graphics.Bitmap

/** Returns the colours of a bitmap, without its transparency. */
fun Bitmap.toPicture(): Picture {
    val colours = IntArray(width * height)
    getPixels(colours, 0, width, 0, 0, width, height)
    return Picture(width, height, 3, ByteArray(colours.size * 3) { (colours[it / 3] shr (16 - it % 3 * 8)).toByte() })
}
