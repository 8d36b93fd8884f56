// For your app's module; merge it with what is there. LiteRT 1.4.2 has the Interpreter API and needs Android 5.
android {
    defaultConfig { testInstrumentationRunner = "androidx.test.runner.AndroidJUnitRunner" }
    androidResources { noCompress += "tflite" }
}

dependencies {
    implementation("com.google.ai.edge.litert:litert:1.4.2")
    androidTestImplementation("androidx.test:runner:1.6.2")
    androidTestImplementation("androidx.test.ext:junit:1.2.1")
}
