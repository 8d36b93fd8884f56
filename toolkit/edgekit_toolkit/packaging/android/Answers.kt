package edgekit

import kotlin.math.exp
import kotlin.math.max
import kotlin.math.min

/** A class with its label and score; [box] is x1, y1, x2, y2 in pixels of the picture, null in a classification. */
class Entry(val label: String, val index: Int, val score: Float, val box: FloatArray?)

enum class Scores { PROBABILITIES, SOFTMAX, SIGMOID }

private fun sigmoid(value: Float): Float = (1 / (1 + exp(-value.coerceIn(-60f, 60f)))).toFloat()

private fun softmax(values: FloatArray): FloatArray {
    val finite = FloatArray(values.size) { values[it].coerceIn(-1e30f, 1e30f) }
    var most = finite[0]
    for (value in finite) most = max(most, value)
    val shares = FloatArray(finite.size) { exp(finite[it] - most) }
    val total = shares.sum()
    return FloatArray(shares.size) { shares[it] / total }
}

private fun toScores(values: FloatArray, kind: Scores): FloatArray = when (kind) {
    Scores.PROBABILITIES -> values
    Scores.SOFTMAX -> softmax(values)
    Scores.SIGMOID -> FloatArray(values.size) { sigmoid(values[it]) }
}

private fun name(labels: List<String>, index: Int): String =
    if (index < labels.size) labels[index] else index.toString()

/** Classification: the best classes of one output; [background] classes at its start are no answer. */
class ClassificationRules(
    private val scores: Scores,
    private val top: Int,
    private val minScore: Float,
    private val background: Int
) {
    fun answer(values: FloatArray, labels: List<String>): List<Entry> {
        val shares = toScores(values, scores).drop(background)
        return shares.indices.sortedByDescending { shares[it] }.take(top)
            .filter { shares[it] >= minScore }
            .map { Entry(name(labels, it), it, shares[it], null) }
    }
}

/**
 * Detection from one output with a row for each box, or its transpose: four numbers for the box, perhaps the score of
 * an object, and a score for each class.
 *
 * @property hasObjects whether the fifth number is the score of an object
 * @property strides pixels of the input for a cell of each grid, if boxes are offsets from cells; else empty
 * @property boxes `centre` for centre and size, `corners` for two corners; with `-yx` vertical values come first
 * @property inShares whether boxes are shares of the input, not pixels
 * @property background which class is none: "none", "first" or "last"
 */
class DetectionRules(
    private val hasObjects: Boolean,
    private val strides: IntArray,
    private val boxes: String,
    private val inShares: Boolean,
    private val scores: Scores,
    private val background: String,
    private val minScore: Float,
    private val overlap: Float,
    private val maxBoxes: Int
) {
    /** Returns the boxes of an output [rows, columns], the best first, in pixels of the picture. */
    fun answer(values: FloatArray, rows: Int, columns: Int, labels: List<String>, placement: Placement): List<Entry> {
        val leading = if (hasObjects) 5 else 4
        val widths = setOf(leading + labels.size, leading + labels.size + if (background == "none") 0 else 1)
        val fits = listOf(rows in widths, columns in widths)
        val isTurned = if (labels.isNotEmpty() && fits[0] != fits[1]) fits[0] else rows < columns
        val count = if (isTurned) columns else rows
        val width = if (isTurned) rows else columns
        val cells = cells(placement)
        require(strides.isEmpty() || cells.size == count) { "there are $count boxes and ${cells.size} cells of grids" }
        val candidates = ArrayList<Entry>()
        for (index in 0 until count) {
            val row = FloatArray(width) { if (isTurned) values[it * columns + index] else values[index * columns + it] }
            val cell = if (strides.isEmpty()) null else cells[index]
            read(row, leading, cell, labels, placement)?.let { candidates.add(it) }
        }
        return suppress(candidates).map { Entry(it.label, it.index, it.score, placement.toPicture(it.box!!)) }
    }

    private fun read(
        row: FloatArray, leading: Int, cell: IntArray?, labels: List<String>, placement: Placement
    ): Entry? {
        val isSigmoid = scores == Scores.SIGMOID
        val objectness = if (hasObjects) (if (isSigmoid) sigmoid(row[4]) else row[4]) else 1f
        if (hasObjects && !(objectness >= minScore)) return null
        var shares = row.copyOfRange(leading, row.size)
        if (scores == Scores.SOFTMAX) shares = softmax(shares)
        val end = shares.size - if (background == "last") 1 else 0
        shares = shares.copyOfRange(if (background == "first") 1 else 0, end)
        var best = 0
        for (index in shares.indices) if (shares[index] > shares[best] || shares[best].isNaN()) best = index
        val score = (if (isSigmoid) sigmoid(shares[best]) else shares[best]) * objectness
        if (!(score >= minScore)) return null
        val box = if (cell == null) corners(row, placement) else onGrid(row, cell)
        val area = areaOf(box)
        val isBox = box[2] > box[0] && box[3] > box[1] && area > 0 && area < Float.POSITIVE_INFINITY
        return if (isBox) Entry(name(labels, best), best, score, box) else null
    }

    private fun corners(row: FloatArray, placement: Placement): FloatArray {
        val order = if (boxes.endsWith("-yx")) intArrayOf(1, 0, 3, 2) else intArrayOf(0, 1, 2, 3)
        val box = FloatArray(4) { row[order[it]] }
        if (boxes.startsWith("centre")) {
            val (halfWidth, halfHeight) = floatArrayOf(box[2] / 2, box[3] / 2)
            val (x, y) = box
            floatArrayOf(x - halfWidth, y - halfHeight, x + halfWidth, y + halfHeight).copyInto(box)
        }
        val sides = intArrayOf(placement.inputWidth, placement.inputHeight)
        if (inShares) for (index in 0..3) box[index] *= sides[index % 2].toFloat()
        return box
    }

    private fun onGrid(row: FloatArray, cell: IntArray): FloatArray {
        val stride = cell[2].toFloat()
        val x = (row[0] + cell[0]) * stride
        val y = (row[1] + cell[1]) * stride
        val halfWidth = exp(row[2]) * stride / 2
        val halfHeight = exp(row[3]) * stride / 2
        return floatArrayOf(x - halfWidth, y - halfHeight, x + halfWidth, y + halfHeight)
    }

    /** Returns column, row and stride of each cell, the finest grid first, row by row. */
    private fun cells(placement: Placement): List<IntArray> = strides.flatMap { stride ->
        val columns = placement.inputWidth / stride
        (0 until placement.inputHeight / stride * columns).map { intArrayOf(it % columns, it / columns, stride) }
    }

    private fun suppress(candidates: List<Entry>): List<Entry> {
        val chosen = ArrayList<Entry>()
        for (entry in candidates.sortedByDescending { it.score }.take(1000)) {
            if (chosen.size == maxBoxes) break
            val isCovered = chosen.any { it.index == entry.index && overlapOf(it.box!!, entry.box!!) > overlap }
            if (overlap >= 1 || !isCovered) chosen.add(entry)
        }
        return chosen
    }
}

private fun areaOf(box: FloatArray): Float = (box[2] - box[0]) * (box[3] - box[1])

private fun overlapOf(first: FloatArray, second: FloatArray): Float {
    val width = min(first[2], second[2]) - max(first[0], second[0])
    val height = min(first[3], second[3]) - max(first[1], second[1])
    val inside = max(width, 0f) * max(height, 0f)
    val union = areaOf(first) + areaOf(second) - inside
    return if (union > 0) inside / union else 0f
}
