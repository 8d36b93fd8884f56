package android.content

import java.io.InputStream

interface AssetManager {
    fun open(name: String): InputStream
}

interface Context {
    val assets: AssetManager
}
