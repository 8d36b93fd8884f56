package androidx.test.platform.app

import android.content.Context

class Instrumentation(val targetContext: Context)

object InstrumentationRegistry {
    fun getInstrumentation(): Instrumentation = TODO()
}
