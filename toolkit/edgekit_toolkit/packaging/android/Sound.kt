package edgekit

import kotlin.math.PI
import kotlin.math.cos
import kotlin.math.hypot
import kotlin.math.ln
import kotlin.math.ln1p
import kotlin.math.min
import kotlin.math.pow
import kotlin.math.round
import kotlin.math.sin
import kotlin.math.sqrt

/** Features of sound over time: logarithms of mel bands, or their cepstrum, as `tf.signal` computes them. */
class FeatureRules(
    val isMfcc: Boolean,
    val frame: Int,
    val hop: Int,
    val melBins: Int,
    val lowHz: Double,
    val highHz: Double,
    val coefficients: Int,
    val power: Int,
    val floor: Double
) {
    val width: Int get() = if (isMfcc) coefficients else melBins

    /** Returns the features of amplitudes, frame by frame. */
    fun compute(amplitudes: FloatArray, sampleRate: Int): FloatArray {
        require(amplitudes.size >= frame) { "the sound has ${amplitudes.size} samples, a frame of the features $frame" }
        val size = Integer.highestOneBit(frame - 1) shl 1
        val bands = melBands(size / 2 + 1, sampleRate)
        val features = FloatArray(((amplitudes.size - frame) / hop + 1) * width)
        for (index in 0 until features.size / width) {
            val real = DoubleArray(size)
            val imaginary = DoubleArray(size)
            for (sample in 0 until frame) {
                real[sample] = amplitudes[index * hop + sample] * (0.5 - 0.5 * cos(2 * PI * sample / frame))
            }
            transform(real, imaginary)
            val spectrum = DoubleArray(size / 2 + 1) { hypot(real[it], imaginary[it]).pow(power) }
            val logarithms = DoubleArray(melBins) { band -> ln(sum(spectrum.size) { spectrum[it] * bands[it][band] } + floor) }
            for (value in 0 until width) {
                features[index * width + value] = (if (isMfcc) cepstrum(logarithms, value) else logarithms[value]).toFloat()
            }
        }
        return features
    }

    private fun cepstrum(logarithms: DoubleArray, coefficient: Int): Double {
        val step = PI / melBins * coefficient
        return sum(melBins) { logarithms[it] * cos((it + 0.5) * step) } * sqrt(2.0 / melBins)
    }

    private fun melBands(bins: Int, sampleRate: Int): Array<DoubleArray> {
        fun mel(hertz: Double) = 1127 * ln1p(hertz / 700)
        val low = mel(lowHz)
        val step = (mel(highHz) - low) / (melBins + 1)
        return Array(bins) { bin ->
            val at = mel(bin * (sampleRate / 2.0) / (bins - 1))
            // As TensorFlow does, the mean of the samples belongs to no band.
            DoubleArray(melBins) { band ->
                val centre = low + step * (band + 1)
                if (bin == 0) 0.0 else min((at - centre + step) / step, (centre + step - at) / step).coerceAtLeast(0.0)
            }
        }
    }
}

private inline fun sum(count: Int, term: (Int) -> Double): Double {
    var total = 0.0
    for (index in 0 until count) total += term(index)
    return total
}

/** Replaces a signal by its Fourier transform, in place; its length is a power of two. */
private fun transform(real: DoubleArray, imaginary: DoubleArray) {
    val size = real.size
    var reversed = 0
    for (index in 1 until size) {
        var bit = size shr 1
        while (reversed and bit != 0) {
            reversed = reversed xor bit
            bit = bit shr 1
        }
        reversed = reversed or bit
        if (index < reversed) real[index] = real[reversed].also { real[reversed] = real[index] }
    }
    var length = 2
    while (length <= size) {
        for (start in 0 until size step length) {
            for (offset in 0 until length / 2) {
                val angle = -2 * PI * offset / length
                val upper = start + offset
                val lower = upper + length / 2
                val re = real[lower] * cos(angle) - imaginary[lower] * sin(angle)
                val im = real[lower] * sin(angle) + imaginary[lower] * cos(angle)
                real[lower] = real[upper] - re
                imaginary[lower] = imaginary[upper] - im
                real[upper] += re
                imaginary[upper] += im
            }
        }
        length *= 2
    }
}

/**
 * The preprocessing of sound, as edgekit applies it on the host and on devices.
 *
 * @property samples length of the sound: longer sound is cut at its end, shorter one gets zeros; null for any
 * @property isTransposed whether features come before frames in the input
 */
class SoundRules(
    val sampleRate: Int,
    private val samples: Int?,
    private val features: FeatureRules?,
    private val scale: Double,
    private val mean: Double,
    private val std: Double,
    private val isTransposed: Boolean,
    private val isInteger: Boolean
) {
    /** Returns the input for amplitudes -1 to 1 of one channel, recorded at [sampleRate]. */
    fun prepare(amplitudes: FloatArray): FloatArray {
        val cut = if (samples == null) amplitudes else amplitudes.copyOf(samples)
        val values = features?.compute(cut, sampleRate) ?: cut
        val finished = FloatArray(values.size) {
            val value = (values[it].toDouble() * scale - mean) / std
            (if (isInteger) round(value) else value).toFloat()
        }
        if (!isTransposed || features == null) return finished
        val frames = finished.size / features.width
        return FloatArray(finished.size) { finished[it % frames * features.width + it / frames] }
    }
}
