package edgekit

import kotlin.math.PI
import kotlin.math.abs
import kotlin.math.ceil
import kotlin.math.max
import kotlin.math.min
import kotlin.math.round
import kotlin.math.sin

/** A picture: bytes 0 to 255, row by row, the channels of a pixel (RGB, or grey alone) side by side. */
class Picture(val width: Int, val height: Int, val channels: Int, val bytes: ByteArray) {
    init {
        require(bytes.size == width * height * channels) { "${bytes.size} bytes for $width x $height x $channels" }
    }
}

/** Where a picture lies in the input: pixels of the input for one of the picture, and its upper left corner there. */
class Placement(
    val width: Int,
    val height: Int,
    val inputWidth: Int,
    val inputHeight: Int,
    val scaleX: Double,
    val scaleY: Double,
    val left: Int,
    val top: Int
) {
    /** Returns a box x1, y1, x2, y2 in pixels of the input as one in pixels of the picture, within it. */
    fun toPicture(box: FloatArray): FloatArray {
        val scales = floatArrayOf(scaleX.toFloat(), scaleY.toFloat())
        val starts = floatArrayOf(left.toFloat(), top.toFloat())
        val sides = floatArrayOf(width.toFloat(), height.toFloat())
        return FloatArray(4) { ((box[it] - starts[it % 2]) / scales[it % 2]).coerceIn(0f, sides[it % 2]) }
    }
}

/** The values of one input in the order of its axes, and the placement of the picture they were made of. */
class PreparedPicture(val values: FloatArray, val placement: Placement)

/** The filters of Pillow's `Image.resize`. */
enum class Filter(val support: Double, val weight: (Double) -> Double) {
    NEAREST(0.0, { 0.0 }),
    BILINEAR(1.0, { x -> max(0.0, 1 - abs(x)) }),
    BICUBIC(2.0, { signed ->
        val x = abs(signed)
        if (x < 1) (1.5 * x - 2.5) * x * x + 1 else if (x < 2) ((x - 5) * x + 8) * x * -0.5 + 2 else 0.0
    }),
    LANCZOS(3.0, { x -> if (x >= -3 && x < 3) sinc(x) * sinc(x / 3) else 0.0 })
}

private fun sinc(x: Double): Double = if (x == 0.0) 1.0 else sin(x * PI) / (x * PI)

/**
 * The preprocessing of a picture, as edgekit applies it on the host and on devices.
 *
 * @property resize height and width in pixels, or the length of the shorter side alone; null keeps the size
 * @property centerCrop height and width in pixels, or null
 * @property letterbox height and width into which the whole picture is fitted, or null
 * @property scale a pixel 0 to 255 becomes (pixel * scale - mean) / std
 * @property isInteger whether the input takes whole numbers, which are rounded
 */
class PictureRules(
    private val resize: IntArray?,
    private val filter: Filter,
    private val centerCrop: IntArray?,
    private val letterbox: IntArray?,
    private val fill: Int,
    private val isCentred: Boolean,
    private val colour: String,
    private val scale: Double,
    private val mean: DoubleArray,
    private val std: DoubleArray,
    private val channelsFirst: Boolean,
    private val isInteger: Boolean
) {
    /** Returns the input for a picture that is upright; Android's decoders leave the turn of EXIF to you. */
    fun prepare(picture: Picture): PreparedPicture {
        val source = if (colour == "L") toGrey(picture) else toRgb(picture)
        val (fitted, placement) = if (letterbox == null) crop(source, scaled(source)) else box(source, letterbox)
        return PreparedPicture(finish(fitted), placement)
    }

    private fun scaled(source: Picture): Picture {
        val sizes = resize ?: return source
        if (sizes.size == 2) return resized(source, sizes[1], sizes[0], filter)
        val side = sizes[0]
        val longer = (side.toDouble() * max(source.width, source.height) / min(source.width, source.height)).toInt()
        require(longer <= 16384) { "the picture is too long and narrow: cut it first" }
        return if (source.width <= source.height) resized(source, side, longer, filter)
        else resized(source, longer, side, filter)
    }

    private fun crop(source: Picture, scaled: Picture): Pair<Picture, Placement> {
        val scaleX = scaled.width.toDouble() / source.width
        val scaleY = scaled.height.toDouble() / source.height
        val (height, width) = centerCrop ?: intArrayOf(scaled.height, scaled.width)
        val left = -cropStart(scaled.width, width)
        val top = -cropStart(scaled.height, height)
        val placement = Placement(source.width, source.height, width, height, scaleX, scaleY, left, top)
        return Pair(pasted(scaled, width, height, left, top, 0), placement)
    }

    private fun box(source: Picture, sizes: IntArray): Pair<Picture, Placement> {
        val (height, width) = sizes
        val ratio = min(height.toDouble() / source.height, width.toDouble() / source.width)
        val innerWidth = max(1, round(source.width * ratio).toInt())
        val innerHeight = max(1, round(source.height * ratio).toInt())
        val left = if (isCentred) (width - innerWidth) / 2 else 0
        val top = if (isCentred) (height - innerHeight) / 2 else 0
        val inner = resized(source, innerWidth, innerHeight, filter)
        val scaleX = innerWidth.toDouble() / source.width
        val scaleY = innerHeight.toDouble() / source.height
        val placement = Placement(source.width, source.height, width, height, scaleX, scaleY, left, top)
        return Pair(pasted(inner, width, height, left, top, fill), placement)
    }

    private fun finish(picture: Picture): FloatArray {
        val channels = picture.channels
        val tables = Array(channels) { channel ->
            FloatArray(256) { pixel ->
                val value = (pixel * scale - mean[channel % mean.size]) / std[channel % std.size]
                (if (isInteger) round(value) else value).toFloat()
            }
        }
        val plane = picture.width * picture.height
        val values = FloatArray(plane * channels)
        for (pixel in 0 until plane) {
            for (channel in 0 until channels) {
                val stored = if (colour == "BGR") channels - 1 - channel else channel
                val value = tables[channel][picture.bytes[pixel * channels + stored].toInt() and 255]
                values[if (channelsFirst) channel * plane + pixel else pixel * channels + channel] = value
            }
        }
        return values
    }
}

private fun cropStart(size: Int, crop: Int): Int =
    if (size >= crop) round((size - crop) / 2.0).toInt() else -((crop - size) / 2)

private fun toRgb(picture: Picture): Picture {
    if (picture.channels == 3) return picture
    val bytes = ByteArray(picture.bytes.size * 3) { picture.bytes[it / 3] }
    return Picture(picture.width, picture.height, 3, bytes)
}

private fun toGrey(picture: Picture): Picture {
    if (picture.channels == 1) return picture
    val bytes = ByteArray(picture.width * picture.height) { pixel ->
        val (red, green, blue) = IntArray(3) { picture.bytes[pixel * 3 + it].toInt() and 255 }
        ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) shr 16).toByte()
    }
    return Picture(picture.width, picture.height, 1, bytes)
}

/** Returns a canvas of one grey with the picture's upper left corner at (left, top); what lies beyond it is cut. */
private fun pasted(picture: Picture, width: Int, height: Int, left: Int, top: Int, grey: Int): Picture {
    if (width == picture.width && height == picture.height && left == 0 && top == 0) return picture
    val channels = picture.channels
    val bytes = ByteArray(width * height * channels) { grey.toByte() }
    val begin = max(0, left)
    val count = min(width, left + picture.width) - begin
    for (row in max(0, top) until min(height, top + picture.height)) {
        val from = ((row - top) * picture.width + begin - left) * channels
        if (count > 0) picture.bytes.copyInto(bytes, (row * width + begin) * channels, from, from + count * channels)
    }
    return Picture(width, height, channels, bytes)
}

/** Returns the picture in another size, with the pixels of Pillow's `Image.resize` (antialiased, fixed point). */
fun resized(picture: Picture, width: Int, height: Int, filter: Filter): Picture {
    if (width == picture.width && height == picture.height) return picture
    if (filter == Filter.NEAREST) return nearest(picture, width, height)
    // The order of Pillow 13, since each pass rounds; earlier releases begin with the width.
    val lostRows = picture.height - height
    val isTall = lostRows > 0 && lostRows > (picture.width - width) * 2
    return if (isTall) widened(heightened(picture, height, filter), width, filter)
    else heightened(widened(picture, width, filter), height, filter)
}

private fun widened(picture: Picture, width: Int, filter: Filter): Picture {
    if (width == picture.width) return picture
    val channels = picture.channels
    val bytes = ByteArray(width * picture.height * channels)
    for (row in 0 until picture.height) {
        val (from, to) = intArrayOf(row * picture.width * channels, row * width * channels)
        resample(picture.bytes, from, bytes, to, picture.width, width, channels, filter)
    }
    return Picture(width, picture.height, channels, bytes)
}

private fun heightened(picture: Picture, height: Int, filter: Filter): Picture {
    if (height == picture.height) return picture
    val row = picture.width * picture.channels
    val bytes = ByteArray(row * height)
    resample(picture.bytes, 0, bytes, 0, picture.height, height, row, filter)
    return Picture(picture.width, height, picture.channels, bytes)
}

private const val PRECISION_BITS = 22

/** Resamples an axis, at each of whose positions `lanes` bytes lie side by side. */
private fun resample(
    source: ByteArray, from: Int, target: ByteArray, to: Int, size: Int, newSize: Int, lanes: Int, filter: Filter
) {
    val scale = size.toDouble() / newSize
    val stretch = max(scale, 1.0)
    val support = filter.support * stretch
    val weights = DoubleArray(ceil(support).toInt() * 2 + 1)
    val factors = IntArray(weights.size)
    for (position in 0 until newSize) {
        val centre = (position + 0.5) * scale
        val begin = max(0, (centre - support + 0.5).toInt())
        val count = min(size, (centre + support + 0.5).toInt()) - begin
        var total = 0.0
        for (tap in 0 until count) {
            weights[tap] = filter.weight((tap + begin - centre + 0.5) * (1 / stretch))
            total += weights[tap]
        }
        for (tap in 0 until count) {
            val weight = (if (total != 0.0) weights[tap] / total else weights[tap]) * (1 shl PRECISION_BITS)
            factors[tap] = (if (weight < 0) weight - 0.5 else weight + 0.5).toInt()
        }
        for (lane in 0 until lanes) {
            var sum = 1 shl (PRECISION_BITS - 1)
            for (tap in 0 until count) {
                sum += (source[from + (begin + tap) * lanes + lane].toInt() and 255) * factors[tap]
            }
            target[to + position * lanes + lane] = (sum shr PRECISION_BITS).coerceIn(0, 255).toByte()
        }
    }
}

private fun nearest(picture: Picture, width: Int, height: Int): Picture {
    val columns = nearestPositions(picture.width, width)
    val rows = nearestPositions(picture.height, height)
    val channels = picture.channels
    val bytes = ByteArray(width * height * channels) {
        val pixel = it / channels
        picture.bytes[(rows[pixel / width] * picture.width + columns[pixel % width]) * channels + it % channels]
    }
    return Picture(width, height, channels, bytes)
}

private fun nearestPositions(size: Int, newSize: Int): IntArray {
    val step = size.toDouble() / newSize
    var position = step * 0.5
    return IntArray(newSize) { min(size - 1, position.toInt()).also { position += step } }
}
