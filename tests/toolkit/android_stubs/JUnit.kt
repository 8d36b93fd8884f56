package org.junit

annotation class Test

object Assert {
    @JvmStatic
    fun assertTrue(message: String, condition: Boolean): Unit = TODO("$message $condition")
}
